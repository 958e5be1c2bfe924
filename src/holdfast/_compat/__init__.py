"""What differs between versions of torch, and every private name of torch that Holdfast touches.

A torch release may rename or move any of these names. Nothing else in ``holdfast`` imports a private module of torch or
reads a private attribute of its objects (``tests/compat`` looks), so that a new release is met in this folder. What a
version lacks is found out by looking for it, not by comparing version numbers.

- ``versions``: which versions of torch are tested, and what to say about the others
- ``tensors``: dtypes that some versions lack, and the insides of tensors and storages
- ``sharded_tensors`` and ``dtensors``: tensors that are spread over ranks
- ``groups``: process groups
- ``modules``: the insides of modules and optimizers

The names that pickles of torch have in them are facts about files and stand with the formats.
"""
