"""Processes, addresses, disks, environment variables and run folders of the machine that mtrain runs on."""
