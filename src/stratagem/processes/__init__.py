"""Child processes of one machine: started, fed over a pipe, watched and ended."""
