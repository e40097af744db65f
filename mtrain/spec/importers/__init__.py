"""Import configs of other projects: translate their keys to a spec, and report every key."""
