"""What is started where: no torch, no Transformers, nothing of the engine.

================  =====================================================================================
``launch``        worker processes of one host, started, watched, restarted
``model_source``  from what the user calls a model to files, configuration and fingerprint
``traces``        OpenTelemetry
``host_check``    `crossdock doctor` on this host; ``trial`` tries a transport between two processes
``fleet_check``   `crossdock doctor` on a running server
``findings``      what both have found, as text and JSON
================  =====================================================================================
"""
