"""Operations that wait for each other, share links and cores, and are played in time."""
