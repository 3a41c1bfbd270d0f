"""Starting a program as the tasks of a cluster: what `stratagem run` does.

- `program`, `plan`: what is started where, checked before anything is
- `local`: the launcher for this machine, and what every launcher does
- `agent`: torch's elastic agent over the processes of `crew`; `meeting`: the launchers of several machines
- `environment`, `ports`, `directory`: what tasks find
- `output`, `failures`: what they write, and what they died of
- `start`, `guard`: run in processes of their own
"""
