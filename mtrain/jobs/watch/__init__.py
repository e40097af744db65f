"""Hangs: what ranks look like from outside, the rules that tell a hang from work, and who waits for whom."""
