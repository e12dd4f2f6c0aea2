"""A lab's life on this machine: started, looked at, stopped, and cleaned up after."""
