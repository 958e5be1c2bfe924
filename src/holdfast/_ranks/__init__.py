"""How ranks agree: steps that carry errors to every rank, roll-call, and connections of our own."""
