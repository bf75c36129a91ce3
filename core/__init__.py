"""Data and decisions shared by all parts: no torch, and no I/O but in `mailbox`.

=================  ====================================================================================
``config``         every knob, frozen dataclasses on one page
``request``        what a client asks for, in tokens
``sequence``       one request while a worker works on it; the chunks of a step
``kv_layout``      where the KV of a block lies in memory
``block_hash``     the keyed hash of a full block and everything before it
``compatibility``  what two workers must agree in before KV goes from one to the other
``block_pool``     the blocks of one worker: free, cached, leased or quarantined
``prefix_cache``   which hash lies in which block, and the events that tell the router
``block_tables``   the one place where sequences get and lose blocks
``messages``       everything that crosses a process border
``mailbox``        how it crosses: ZeroMQ
``gguf_header``    the metadata of a GGUF file
``gguf_config``    the same as a Hugging Face config
``part``           the protocol between the engine and its two parts
``unfit``          which requests a worker can never serve
=================  ====================================================================================
"""
