"""What memory is used."""
