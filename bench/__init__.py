"""What guards cost: every module here runs alone (`python -m bench.NAME --json`)."""
