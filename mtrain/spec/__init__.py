"""What a user asks for: reading, merging and validating specs, and finding plugins."""
