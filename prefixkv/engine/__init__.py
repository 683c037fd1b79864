"""The loop, the thread around it and the public face."""
