"""What must be true while a run goes on."""
