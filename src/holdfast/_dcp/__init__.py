"""The flows that DCP's planners and storages take part in, the planners, and what carries out their plans."""
