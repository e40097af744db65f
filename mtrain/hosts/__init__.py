"""One job on several hosts: a leader, an agent on every host, and what they say to each other."""
