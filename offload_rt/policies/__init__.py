"""Token selection policies, one file each. They return token indices and never copy KV."""
