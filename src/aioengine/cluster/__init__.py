"""Several engines behind one; docs/internals/cluster.md explains how.

- `backend`: the `Backend` that has backends. `replica`: the life of one replica. `launchers`, `ray_launcher`,
  `lockstep_launcher`: where replicas come from. `devices`: the share of a machine that each gets.
- `cluster_core`: a `Core` over the cores of the replicas. `placing` and `balancer`: which replica gets a sequence.
  `recovery`: what a death means for a sequence. `broadcast`: control calls at all replicas.
- `coordinator`, `coordinator_messages`, `further_front_end`: several front ends of the same replicas.
- `lockstep`, `lockstep_group`: engines that run each step together.
"""
