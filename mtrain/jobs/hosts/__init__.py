"""A job on several hosts: a leader, an agent on each host, and the messages between them."""
