"""How runs are made: servers, ranks, what is watched in them."""
