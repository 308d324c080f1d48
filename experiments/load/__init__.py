"""An open-loop load generator: requests leave when the schedule says, whether or not the server keeps up."""
