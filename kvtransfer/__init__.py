"""Blocks between workers: from the pool of the one that computed them into the pool of the one that decodes.

Only the files of a GPU know torch, and they are imported only where there is one.

===============  ======================================================================================
``lease``        a promise on blocks, with its deadline and generation
``plan``         which blocks of which layer group go where
``sender``       one transfer as the prefill side sees it, a pure state machine
``receiver``     one transfer as the decode side sees it, a pure state machine
``probe``        trying the transports of a pair, borrower and lender, pure state machines
``pool_bytes``   the memory of a pool as bytes; ``device_pool`` of one on a GPU
``transport``    what a transport must do
``pieces``       what transports that stage have in common; ``staging_ring`` are their buffers
``shm``          shared memory of one host
``cuda_ipc``     copies into a mapped pool of another GPU; ``cuda_memory`` maps it
``ucx``          whatever UCX finds between two hosts or GPUs; with ``ucx_inbox`` and ``ucx_port``
``nccl``         channels between fixed pairs of GPUs; with ``nccl_channel``, ``_inbox``, ``_library`` and ``_gpu``
``ucx_lanes``    what UCX has chosen, and whether TCP is a pity
``tcp``          ZeroMQ frames, between any two hosts
``offers``       which transports reach a pool, by name
``links``        which transport leads to which peer; the effects of all the above
===============  ======================================================================================
"""
