"""The verbs of the command line, a file each, and the code that they share."""
