"""A record of a restore for people: numbers, text, pictures. Pure: a record in, values and text out."""
