"""What is started where: no torch, no Transformers, nothing of the engine.

================  =====================================================================================
``model_source``  from what the user calls a model to files, configuration and fingerprint
================  =====================================================================================
"""
