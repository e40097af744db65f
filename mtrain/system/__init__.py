"""Processes, addresses, disks, environment and run folders of one machine."""
