"""The demo: the main job with everything that can go wrong in it, and an account of each message at the end."""
