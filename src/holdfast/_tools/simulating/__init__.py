"""What a save or load by very many ranks costs, found out without them."""
