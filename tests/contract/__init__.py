"""The contract of a server as a file, and the changes that break its callers."""
