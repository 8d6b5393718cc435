"""Rewards of responses: built-in functions, users' functions and reward servers."""
