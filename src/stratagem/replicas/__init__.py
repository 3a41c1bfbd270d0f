"""How replica processes are started, fed, watched and stopped.

- `forkserver`, `launcher`: a process that has imported torch, and how children come from it
- `child`: the loop of a child; `group`: all children, from the controller's side
- `wire`: how objects travel between them; `registry`: those that travel as references
- `memory`: the memory that they share
"""
