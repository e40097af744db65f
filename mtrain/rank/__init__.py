"""What one rank runs."""
