"""The door: who may come in, how often, with what, and what is written down about it. All of it is off by default.

====================  ================================================================================
``door``              puts the middleware below before an application
``access``            what is decided at the door, put together from one configuration
``admission``         ASGI middleware: key, limits and deadline of a request, before its body is read
``body``              ASGI middleware: size and nesting of a body, before it is parsed
``request_id``        ASGI middleware: an id in, or a new one, and out with every answer
``caller``            who asks: name, tenant, priority, limits
``keys``              API keys as salted hashes; ``key_file`` reads, changes and watches their file
``visit``             one request between admission and its end
``account``           how much of its limits a key has used: pure, over ``bucket``
``usage``             tokens by day, key and model, in SQLite; ``usage_report`` reads them again
``tls``               the certificate, and its renewal
``exposure``          what whoever starts a server must hear
====================  ================================================================================
"""
