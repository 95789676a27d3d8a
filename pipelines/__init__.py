"""The stages of the life cycle, one file each, as Ray jobs over artifacts; and what they share."""
