"""The network on the device: one decoder described by data, its weights, its KV memory and the loop that runs it.

==================  ==================================================================================
``engine``          the loop: plan, launch, finish
``executor``        what the loop knows of a device; ``cpu_executor`` and ``cuda_executor`` are the two
``startup``         from files to an engine without its parts (``engine_plan``, ``cuda_startup``, ``gpu_memory``)
``spec``            a decoder as data; ``families`` makes it from a config, ``loading`` builds it
``weights``         checkpoints: safetensors, or ``gguf``
``transformer``     the forward pass; ``layers``, ``rope`` and ``attention`` are its pieces on a CPU
``cuda_layers``     the same pieces on a GPU, with ``cuda_attention``
``batch``           a step as tensors, on a CPU
``step_packing``    a step as one upload, on a GPU (``step_inputs``, ``step_shapes``, ``seats``)
``cuda_runner``     one step on a GPU, as a graph (``cuda_graphs``) where there is one; ``warm_up`` compiles ahead
``sampler``         from logits to tokens; ``cuda_sampler`` on a GPU
``kv_tensors``      the memory of the pool
``device_stream``   events, graphs and pinned memory, so thin that tests do without
==================  ==================================================================================
"""
