# SPDX-License-Identifier: Apache-2.0
#
# What both consumers build: a program, header-only and compiled; and what must not link, some of each.
add_executable(consumer "${CMAKE_CURRENT_LIST_DIR}/main.cpp")
target_link_libraries(consumer PRIVATE gradaccum::gradaccum)
add_executable(consumer_compiled "${CMAKE_CURRENT_LIST_DIR}/main.cpp")
target_link_libraries(consumer_compiled PRIVATE gradaccum::compiled)

add_library(mixed_in OBJECT EXCLUDE_FROM_ALL "${CMAKE_CURRENT_LIST_DIR}/mixed.cpp")
target_link_libraries(mixed_in PRIVATE gradaccum::gradaccum)
add_executable(mixed EXCLUDE_FROM_ALL "${CMAKE_CURRENT_LIST_DIR}/mixed.cpp" $<TARGET_OBJECTS:mixed_in>)
target_link_libraries(mixed PRIVATE gradaccum::compiled)
