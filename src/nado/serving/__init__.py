"""`nado serve`: an OpenAI-compatible endpoint over guided models, and a playground page.

schema.py      what a request may say
jobs.py        a request as the engine sees it, and what comes back
models.py      what is served: a base, its guides and their oracles
voices.py      q with settings of its own for every row of a batch
text_stream.py tokens to text, never half a character nor part of a stop sequence
pool.py        a batch of fixed shape whose rows come and go
joining.py     how new rows join it
engine.py      the thread that steps the pools
reading.py     from a request to a job
answers.py     answers in OpenAI's words
refusals.py    errors in OpenAI's shape
gates.py       who may ask, and how much: hosts, token, sizes
metrics.py     Prometheus text
api.py         the application: routes, streaming, errors
server.py      the application behind uvicorn
"""
