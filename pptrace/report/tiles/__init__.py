"""The timeline's data: what ranks did as tracks of bars, cut into tiles at any zoom."""
