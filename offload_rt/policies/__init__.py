"""Token selection policies, one per file. Policies return token indices and never copy KV."""
