"""The link between host memory and the compute device: plans, copies, tickets, counters."""
