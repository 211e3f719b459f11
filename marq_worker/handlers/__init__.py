"""Handler processes: started, watched and stopped by their worker."""
