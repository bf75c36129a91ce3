"""What a model's text says: reasoning, tool calls and the answer itself told apart, as the text comes.

`deltas` are what a parser gives, `reasoning` and one file a family know the spellings, `families` chooses among them.
"""
