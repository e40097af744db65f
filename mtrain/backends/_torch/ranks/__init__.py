"""How the ranks of torch start, find each other and leave."""
