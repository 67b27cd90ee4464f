"""The private names of torch, Lightning and Hydra that we lean on, each with why; nothing else of ours uses any.

Tried with torch 2.6 to 2.15, Lightning 2.5 to 2.6.6 and Hydra 1.3.2 to 1.4.0rc3. What our strategies inherit or
override and is private in Lightning's ``DDPStrategy`` is listed in `lightning_commopt.compat.lightning`.
"""
