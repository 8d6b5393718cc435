"""Model cards, and upload to the Hugging Face Hub."""
