"""What the command line runs: one file for each verb, and what verbs share."""
