"""The machine that a process runs on: signals, exit codes, disks, memory, temporary files."""
