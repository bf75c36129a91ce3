"""The network on the device: one decoder described by data, its weights, its KV memory and the loop that runs it."""
