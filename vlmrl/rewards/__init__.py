"""What an answer is worth."""
