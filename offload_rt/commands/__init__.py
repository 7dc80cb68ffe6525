"""The subcommands of `offload-rt`, one file each: `add(commands)` enters its flags, `run(args)` does the work."""
