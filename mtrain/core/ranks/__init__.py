"""What the ranks of a job are to one another: their mesh, what they agree about, what they send, who waits for whom."""
