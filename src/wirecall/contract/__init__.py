"""The contract of a server, as a file: what callers rely on, and which changes of it break them."""
