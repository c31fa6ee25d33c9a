"""Child processes, threads and turns of the loop: what every room that runs something beside the loop stands on."""
