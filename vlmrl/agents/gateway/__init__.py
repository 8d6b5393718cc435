"""An OpenAI-compatible server in front of an engine, by which any agent program is trained, and what it was sent."""
